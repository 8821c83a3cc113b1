"""The parameters of the bag player."""

from worldmodel_ros.parameters.declaration import Param

PARAMETERS = (
    Param('bag', '', 'rosbag2 folder to play, or a single .mcap or .db3 file', read_only=True),
    Param('config', '', 'YAML file that says which topics of the bag are the camera, the actions and the goal, and how to '
          'interpret their values (examples in config/evaluate/); empty: guess', read_only=True),
    Param('model', 'tiny', 'model to play for: its actions determine what is read from the bag', read_only=True),
    Param('rate', 1.0, 'seconds of the bag in one second', low=0.01, high=100.0),
    Param('start_paused', False, 'start paused; continue with ~/resume or ~/play_next', read_only=True),
    Param('loop', False, 'start over at the end of the bag', read_only=True),
    Param('clock_hz', 40.0, 'rate of /clock between messages', low=1.0, high=1000.0, read_only=True),
    Param('wait_for', '', 'lifecycle node that must be active before the first message is played; empty: none', read_only=True),
    Param('wait_s', 180.0, 'maximum wait for that node and for a subscriber to the images; playback then starts anyway',
          low=0.0, high=3600.0, read_only=True),
)
