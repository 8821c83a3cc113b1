"""A world model that drives a robot over ROS 2; worldmodel_ros.msg and worldmodel_ros.srv are generated."""
# Found first on sys.path, a source tree or pip install must still see the generated modules of a sourced overlay.
__path__ = __import__('pkgutil').extend_path(__path__, __name__)

__version__ = '0.1.0'
