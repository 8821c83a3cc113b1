"""The parameters of the world model node."""

from dataclasses import replace

from worldmodel_ros.engine.backends import BACKENDS, PARALLEL_BACKENDS, PARALLEL_KINDS
from worldmodel_ros.engine.session_folder import MAX_FILES, MAX_MB
from worldmodel_ros.parameters.declaration import ALLOW_FAULTS, DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.parameters.velocity_limits import VELOCITY_LIMITS
from worldmodel_ros.serving.client.network import EndpointError, server_address
from worldmodel_ros.serving.transport.address import AddressError


def _server_refusal(server: str) -> str | None:
    try:
        server_address(server)
    except (AddressError, EndpointError) as error:
        return str(error)
    return None


PARAMETERS = (
    # ``while_configured``: changing these would require another engine or other subscriptions.
    Param('model', 'tiny', 'name of a shipped model, or a folder written by `worldmodel train`, or a folder with '
          '`world.json`: an open world model, which predicts but never commands', while_configured=True),
    Param('backend', 'auto', 'inference back end; auto: torch on a GPU and for models with tiles, else ONNX Runtime. '
          'torch-bf16, torch-compiled, torch-fp8 and torch-fp4 are for GPUs', choices=BACKENDS, while_configured=True),
    Param('threads', 1, 'threads of one network call on a CPU; more than one pays off only on an idle machine', low=1,
          high=256, while_configured=True),
    Param('gpus', 1, 'number of GPUs of this machine that the model is split across, if its preset has tiles or it is an open '
          f'world model; with more than one, backend must be one of {", ".join(PARALLEL_BACKENDS)}', low=1, high=64,
          while_configured=True),
    Param('parallel', PARALLEL_KINDS[0], 'how a model is split across GPUs: by frames (sequence; sequence-fp8 exchanges '
          'messages in FP8), or by weights (tensor)', choices=PARALLEL_KINDS, while_configured=True),
    Param('server', '', 'engine shared by several robots (`worldmodel serve`): path of its socket, auto for the default one, '
          'or wss://HOST:PORT for one on another machine (`worldmodel gateway`); empty: none. While it is unavailable, the '
          'node drives with its own model. With forecast the node decides, and the server only predicts what the decision '
          'leads to', check=_server_refusal, while_configured=True),
    Param('server_token_file', '', 'file with the token that the gateway of a server on another machine requires',
          while_configured=True),
    Param('server_ca_file', '', 'PEM file of the certificate authorities accepted for the gateway; empty: those of the system',
          while_configured=True),
    Param('server_certificate_file', '', 'PEM file with a certificate and key of this robot, if the gateway requires one',
          while_configured=True),
    Param('forecast', '', 'name of a shipped scene forecast, or its folder: commands are then chosen by their predicted '
          'outcome, for a goal or a task (~/set_task); empty: the policy of the model drives', while_configured=True),
    Param('command_delay_s', 0.0, 'with forecast: delay of the base from a command to its effect, by which robot and scene '
          'are rolled forward', low=0.0, high=1.0, while_configured=True),
    Param('candidate_rounds', 2, 'with forecast: maximum number of comparison steps; 1 disables the two-step tier (more '
          'rounds, or a longer horizon), 0 the one-step tier, too', low=0, high=2, while_configured=True),
    Param('candidates', 16, 'with forecast: maximum number of candidates compared in a round; fewer if the deadline does not '
          'leave enough time', low=4, high=16, while_configured=True),
    *(replace(limit, description=f"with forecast, for candidates: {limit.description}. Set it to the command gate's",
              formerly='') for limit in VELOCITY_LIMITS),
    Param('image_transport', 'raw', 'raw: camera/image_raw; compressed: camera/image_raw/compressed',
          choices=('raw', 'compressed'), while_configured=True),
    Param('use_camera_info', True, 'warp images to the view of the training camera, using camera/camera_info; false: crop and '
          'scale them, whatever the camera', while_configured=True),
    Param('image_rectified', False, 'the images are rectified (image_proc): their camera matrix is in p of camera_info, and '
          'they have no distortion', while_configured=True),
    Param('camera_height_m', None, 'height of the camera above the floor; unset: from tf', 'm', low=0.0, high=10.0,
          type='double', while_configured=True),
    Param('camera_pitch_deg', None, 'downward pitch of the camera; unset: from tf. Images are rotated to the pitch of the '
          'training camera if the camera sees enough', 'degrees', low=-90.0, high=90.0, type='double', while_configured=True),
    Param('executed_action_topic', 'cmd_vel', 'topic of the commands that the robot actually executes', while_configured=True),
    Param('enable_stamped_cmd_vel', True, 'executed actions are TwistStamped; false: Twist', while_configured=True),
    Param('executed_timeout_s', 0.5, 'how long an executed command is assumed to stay in force: the timeout after which the '
          'base brakes; 0: until the next command, for a base without a timeout and a topic that publishes only changes',
          low=0.0, high=60.0, while_configured=True),
    Param('base_frame', 'base_link', 'frame of the commands and of the predicted paths', while_configured=True),
    Param('goal', '', 'what to drive to, one of the goals of the model; empty: observe, but command nothing. The topic goal '
          'changes the goal, too'),
    Param('deadline_s', 0.05, 'maximum age of the observation (ROS time) when the robot receives the command', low=0.001,
          high=10.0),
    Param('reserve_s', 0.012, 'part of deadline_s reserved for the gate and the transport: if the model has not finished by '
          'deadline_s - reserve_s, the last plan continues', low=0.0, high=1.0),
    Param('headroom_s', 0.003, 'spare time that a better tier must have before it is used again', low=0.0, high=1.0),
    Param('recovery_ticks', 3, 'number of consecutive ticks that must be on time before a better tier is used again', low=1,
          high=1000),
    Param('tick_tolerance_s', 0.05, 'how much earlier than one step period after the last used image the next one may come',
          low=0.0, high=1.0),
    Param('time_jump_s', 1.0, 'a gap or a backward jump of the stamps larger than this starts a new episode', low=0.1,
          high=3600.0),
    Param('future_tolerance_s', 0.1, 'how far in the future an image may be stamped, to allow for small clock offsets and a '
          'coarse /clock', low=0.0, high=10.0),
    Param('camera_timeout_s', 0.25, 'time without an image (steady clock) after which the robot is stopped', low=0.01,
          high=60.0),
    Param('frozen_camera_timeout_s', 0.5, 'the robot is stopped if the image does not change for this long although the '
          'executed command moves the robot; 0: never, for a camera without any noise', low=0.0, high=60.0),
    Param('frozen_camera_recovery', 3, 'images to wait, after the image changes again, before driving resumes', low=1,
          high=1000),
    Param('what_if_horizon_s', 1.6, 'horizon of ~/what_if for requests that give none', low=0.1, high=10.0),
    Param('what_if_timeout_s', 5.0, 'time limit of ~/what_if for requests without a deadline', low=0.1, high=60.0),
    Param('what_if_denoising_steps', 2, 'denoising steps for each chunk predicted by ~/what_if: 2 for sharper images; 1 takes '
          'a quarter less time and separates the outcomes of commands slightly better', low=1, high=2),
    Param('world_observes', False, 'for an open world model: commit real images to one long session and predict from its '
          'newest chunk; false: each prediction starts a session with the newest image', while_configured=True),
    Param('world_chunks', 1, 'for an open world model: chunks per prediction', low=1, high=16, while_configured=True),
    Param('world_deadline_s', 0.0, 'for an open world model: target time for a prediction; if it would take longer, fewer '
          'steps or the smaller model named in world.json are used; 0: always the best quality', low=0.0, high=600.0,
          while_configured=True),
    Param('session_directory', '', 'folder of ~/save_session and ~/load_session, which accept only names of files in it; '
          'empty: worldmodel_sessions in $ROS_HOME or ~/.ros. While a server drives, its own folder is used'),
    Param('session_files_max', MAX_FILES, 'maximum number of sessions saved in session_directory', low=1, high=10_000),
    Param('session_disk_mb', float(MAX_MB), 'maximum disk space of all sessions in session_directory together', low=1.0,
          high=1e7),
    DIAGNOSTICS_PERIOD,
    ALLOW_FAULTS,
    Param('fault_delay_ms', 0.0, 'for tests: delay added to every network call', low=0.0, high=10_000.0, fault=True),
    Param('fault_nan', False, 'for tests: the plan is NaN', fault=True),
    Param('fault_raise', False, 'for tests: every network call fails', fault=True),
    Param('fault_cuda_error', '', 'for tests: every network call raises the CUDA error with this name, such as "an illegal '
          'memory access was encountered"', fault=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority of the threads that receive and answer; 0: none', low=0, high=99,
          read_only=True),
)
