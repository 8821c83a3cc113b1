"""Closed-loop robot control with a video world model, on ROS 2; worldmodel_ros.msg and worldmodel_ros.srv are generated."""
# A source tree or pip install that comes first on sys.path must still find the generated modules of a sourced overlay.
__path__ = __import__('pkgutil').extend_path(__path__, __name__)

__version__ = '0.1.0'
