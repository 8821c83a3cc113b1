"""The parameters of the recorder."""

from worldmodel_ros.parameters.declaration import DIAGNOSTICS_PERIOD, Param

TOPICS = ('camera/image_raw', 'camera/image_raw/compressed', 'camera/camera_info', 'cmd_vel', 'odom', 'goal', 'goal_pose',
          'goal_image', 'task', 'action_chunk', 'predicted_future', 'predicted_image/compressed', 'predicted_path', 'decision',
          'decision_paths', 'deadline_status', 'command_status', '/diagnostics')
OPTIONAL = ('camera/camera_info', 'goal', 'goal_pose', 'goal_image', 'task', 'odom', 'decision', 'decision_paths',
            'command_status')

PARAMETERS = (
    Param('bag', '', 'folder to create for the bag; empty: rosbag2_<date and time> in the working directory', read_only=True),
    Param('topics', TOPICS, 'topics to record as soon as they have a publisher; relative names are resolved in the namespace '
          'of the node', read_only=True),
    Param('optional_topics', OPTIONAL, 'topics of the list that may have no publisher; for others without one, the '
          'diagnostics warn. A camera needs only one of raw and compressed', read_only=True),
    Param('max_file_mb', 1000, 'size at which the bag continues in a new file; 0: a single file', low=0, high=1_000_000,
          read_only=True),
    Param('queue_mb', 64, 'memory for messages that wait to be written to disk; beyond it the oldest are dropped', low=1,
          high=100_000, read_only=True),
    DIAGNOSTICS_PERIOD,
)
