"""The parameters of the simulated robot, including those that inject faults."""

from worldmodel_ros.parameters.declaration import ALLOW_FAULTS, DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.sim.task_scenes import SCENES

MAX_CLOCK_OFFSET = 900.0  # s

PARAMETERS = (
    Param('seed', 1_000_003, 'seed of the first simulated room (layout, colours, light, friction); each reset takes the next '
          'seed. 0 to 999999 are training rooms', low=0, high=2**31 - 1, read_only=True),
    Param('randomise', True, 'vary colours, light, friction and camera noise with the seed, not only the layout',
          read_only=True),
    Param('task', '', 'task that the robot is given and evaluated on (docs/tasks.md), in one room after another; empty: none, '
          'and the robot stays in its room until a reset', choices=('', *SCENES), read_only=True),
    Param('camera_rate_hz', 10.0, 'image rate', low=1.0, high=50.0),
    Param('camera_width', 64, 'image width', 'pixels', low=64, high=640),
    Param('camera_height', 64, 'image height; the vertical field of view is fixed', 'pixels', low=64, high=480),
    Param('publish_compressed', False, 'also publish camera/image_raw/compressed (JPEG)'),
    Param('base_frame', 'base_link', 'frame of the base. Its name up to the last slash is also the prefix of the odometry and '
          'camera frames', read_only=True),
    Param('publish_clock', False, 'publish /clock, and use simulated time for stamps', read_only=True),
    Param('enable_stamped_cmd_vel', True, 'cmd_vel is a TwistStamped; false: a Twist', read_only=True),
    Param('cmd_vel_timeout_s', 0.5, 'brake after this long without a command; 0: never', low=0.0, high=10.0),
    Param('deadline_s', 0.05, 'a command counts as late if the observation that it answers is older than this', low=0.001,
          high=10.0),
    Param('snapshots', 100, 'number of observations that ~/what_if can branch from', low=1, high=10000, read_only=True),
    Param('what_if_horizon_s', 1.6, 'horizon of ~/what_if for requests that give none', low=0.1, high=10.0, read_only=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority; it stands in for real hardware, which other processes cannot slow '
          'down; 0: none', low=0, high=99, read_only=True),
    DIAGNOSTICS_PERIOD,
    ALLOW_FAULTS,
    Param('camera_stop', False, 'fault: stop publishing images', fault=True),
    Param('camera_freeze', False, 'fault: keep publishing the same image, with new stamps', fault=True),
    Param('camera_encoding', 'rgb8', 'fault unless rgb8: encoding that raw images claim to have', fault=True),
    Param('camera_break', 'none', 'fault unless none: raw images without data, with half of their data, or that claim twice '
          'the height of their data', choices=('none', 'empty', 'short', 'wrong_size'), fault=True),
    Param('clock_stop', False, 'fault: stop publishing /clock (with publish_clock)', fault=True),
    Param('clock_offset_s', 0.0, 'fault unless 0: offset added to all stamps and to /clock; changing it makes time jump',
          low=-MAX_CLOCK_OFFSET, high=MAX_CLOCK_OFFSET, fault=True),
)
