"""The parameters of the simulated robot, including those that inject faults."""

from worldmodel_ros.parameters.declaration import ALLOW_FAULTS, DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.sim.task_scenes import SCENES

MAX_CLOCK_OFFSET = 900.0  # s

PARAMETERS = (
    Param('seed', 1_000_003, 'seed of the first simulated room (layout, colours, light, friction); a reset takes the next one. '
          '0 to 999999 are training rooms', low=0, high=2**31 - 1, read_only=True),
    Param('randomise', True, 'colours, light, friction and camera noise follow the seed too, not the layout alone',
          read_only=True),
    Param('task', '', 'task that the robot is told and judged by (docs/tasks.md), one room after another; empty: none, and it '
          'stays in its room until a reset', choices=('', *SCENES), read_only=True),
    Param('camera_rate_hz', 10.0, 'rate of the images', low=1.0, high=50.0),
    Param('camera_width', 64, 'width of the images', 'pixels', low=64, high=640),
    Param('camera_height', 64, 'height of the images; the vertical field of view is fixed', 'pixels', low=64, high=480),
    Param('publish_compressed', False, 'publish camera/image_raw/compressed (JPEG) too'),
    Param('base_frame', 'base_link', 'frame of the base. What stands before its last slash also begins the frames of '
          'odometry and camera', read_only=True),
    Param('publish_clock', False, 'publish /clock, and stamp with simulated time', read_only=True),
    Param('enable_stamped_cmd_vel', True, 'take cmd_vel as TwistStamped rather than Twist', read_only=True),
    Param('cmd_vel_timeout_s', 0.5, 'brake when no command has come for this long; 0: never', low=0.0, high=10.0),
    Param('deadline_s', 0.05, 'a command that answers an older observation counts as late', low=0.001, high=10.0),
    Param('snapshots', 100, 'how many observations ~/what_if can branch from', low=1, high=10000, read_only=True),
    Param('what_if_horizon_s', 1.6, 'horizon of ~/what_if when a request leaves it open', low=0.1, high=10.0, read_only=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority, in place of the hardware that this robot stands for, '
          'which no other process can slow down; 0: none', low=0, high=99, read_only=True),
    DIAGNOSTICS_PERIOD,
    ALLOW_FAULTS,
    Param('camera_stop', False, 'fault: publish no more images', fault=True),
    Param('camera_freeze', False, 'fault: publish the same image again and again, with new stamps', fault=True),
    Param('camera_encoding', 'rgb8', 'fault unless rgb8: the encoding that raw images claim to have', fault=True),
    Param('camera_break', 'none', 'fault unless none: raw images without data, with half of their data, or with twice the '
          'height that the data have', choices=('none', 'empty', 'short', 'wrong_size'), fault=True),
    Param('clock_stop', False, 'fault: publish no more /clock (with publish_clock)', fault=True),
    Param('clock_offset_s', 0.0, 'fault unless 0: added to all stamps and to /clock; a change is a jump',
          low=-MAX_CLOCK_OFFSET, high=MAX_CLOCK_OFFSET, fault=True),
)
