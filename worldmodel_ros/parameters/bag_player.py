"""The parameters of the bag player."""

from worldmodel_ros.parameters.declaration import Param

PARAMETERS = (
    Param('bag', '', 'rosbag2 folder to be played, or one .mcap or .db3 file', read_only=True),
    Param('config', '', 'YAML file that says which topics of the bag are the camera, the actions and the goal, and what the '
          'numbers mean (config/evaluate/ has examples); empty: guess', read_only=True),
    Param('model', 'tiny', 'model to play for: its actions decide what is taken of the bag', read_only=True),
    Param('rate', 1.0, 'seconds of the bag in one second', low=0.01, high=100.0),
    Param('start_paused', False, 'begin paused: ~/resume or ~/play_next go on', read_only=True),
    Param('loop', False, 'begin again at the end', read_only=True),
    Param('clock_hz', 40.0, 'how often /clock is published between two messages', low=1.0, high=1000.0, read_only=True),
    Param('wait_for', '', 'lifecycle node that must be active before the first message; empty: none', read_only=True),
    Param('wait_s', 180.0, 'time to wait for that node, and for a subscriber to the images; then play all the same',
          low=0.0, high=3600.0, read_only=True),
)
