"""The parameters of the world model node."""

from worldmodel_ros.engine.backends import BACKENDS, PARALLEL_BACKENDS, PARALLEL_KINDS
from worldmodel_ros.engine.session_folder import MAX_FILES, MAX_MB
from worldmodel_ros.parameters.declaration import ALLOW_FAULTS, DIAGNOSTICS_PERIOD, Param
from worldmodel_ros.serving.client.network import EndpointError, server_address
from worldmodel_ros.serving.transport.address import AddressError


def _server_refusal(server: str) -> str | None:
    try:
        server_address(server)
    except (AddressError, EndpointError) as error:
        return str(error)
    return None


PARAMETERS = (
    # Those that are fixed while configured would need another engine or other subscriptions to change.
    Param('model', 'tiny', 'name of a shipped model, or a folder that `worldmodel train` wrote, or one with `world.json`: an '
          'open world model, which predicts and never commands', while_configured=True),
    Param('backend', 'auto', 'what runs the networks; auto takes torch on a GPU and for a model over tiles, else ONNX '
          'Runtime. Of the others, torch-bf16, torch-compiled, torch-fp8 and torch-fp4 are for '
          'GPUs', choices=BACKENDS, while_configured=True),
    Param('threads', 1, 'threads of one network call on a CPU; more than one pays only on an idle machine', low=1, high=256,
          while_configured=True),
    Param('gpus', 1, 'GPUs of this machine that the model is divided among, if its preset has tiles or it is an open world '
          'model; on more than one, '
          f'backend is one of {", ".join(PARALLEL_BACKENDS)}', low=1, high=64, while_configured=True),
    Param('parallel', PARALLEL_KINDS[0], 'how a model is divided among GPUs: by frames, with messages in full or in FP8, or by '
          'weights', choices=PARALLEL_KINDS, while_configured=True),
    Param('server', '', 'socket of an engine that robots share (`worldmodel serve`), auto for the default one, '
          'wss://HOST:PORT for one of another machine (`worldmodel gateway`), empty for none; while it is away, the node '
          'drives with its own model. With forecast the node decides, and the server imagines what was decided',
          check=_server_refusal, while_configured=True),
    Param('server_token_file', '', 'file with the token that the gateway of a server on another machine asks for',
          while_configured=True),
    Param('server_ca_file', '', 'PEM file of the authorities that its certificate may be of; empty: those of the system',
          while_configured=True),
    Param('server_certificate_file', '', 'PEM file with a certificate of this robot and its key, where the gateway asks for '
          'one', while_configured=True),
    Param('forecast', '', 'name of a shipped scene forecast, or a folder of one: commands are then decided by what they would '
          'lead to, by a goal or by ~/set_task; empty: the policy of the model drives', while_configured=True),
    Param('command_delay_s', 0.0, 'time that the base takes from a command to its effect, with forecast: robot and scene are '
          'rolled forward by it', low=0.0, high=1.0, while_configured=True),
    Param('candidate_rounds', 2, 'with forecast: steps of comparing candidates at most; 1 leaves out the two-step rung (a '
          'second round, or a longer future), 0 the one-step rung, too', low=0, high=2, while_configured=True),
    Param('candidates', 16, 'with forecast: candidates compared at most in a round; fewer where the time before the deadline '
          'does not allow so many', low=4, high=16, while_configured=True),
    Param('image_transport', 'raw', 'raw takes camera/image_raw, compressed takes camera/image_raw/compressed',
          choices=('raw', 'compressed'), while_configured=True),
    Param('use_camera_info', True, 'warp images to the view of the camera that the model was trained with, as '
          'camera/camera_info tells; false: crop and scale them, whatever camera they are of', while_configured=True),
    Param('image_rectified', False, 'the images are rectified (image_proc): their camera matrix is in p of camera_info, and '
          'they have no distortion', while_configured=True),
    Param('camera_height_m', None, 'height of the camera above the floor; unset: from tf', 'm',
          low=0.0, high=10.0, type='double', while_configured=True),
    Param('camera_pitch_deg', None, 'how far the camera looks down; unset: from tf. Images are '
          'turned to the pitch of training where the camera sees enough', 'degrees',
          low=-90.0, high=90.0, type='double', while_configured=True),
    Param('executed_action_topic', 'cmd_vel', 'topic of the commands that the robot really executes', while_configured=True),
    Param('enable_stamped_cmd_vel', True, 'take the executed actions as TwistStamped rather than Twist', while_configured=True),
    Param('executed_timeout_s', 0.5, 'an executed command counts for no longer than this, after which the '
          'base brakes (its own time-out); 0: until the next one, for a base without a time-out and a topic that tells '
          'changes only', low=0.0, high=60.0, while_configured=True),
    Param('base_frame', 'base_link', 'frame of the commands and of the predicted paths', while_configured=True),
    Param('goal', '', 'what to drive to: one of the goals of the model; empty: look, and command nothing. The topic goal '
          'changes it, too'),
    Param('deadline_s', 0.05, 'age of the observation (ROS time) at which the robot must have the command',
          low=0.001, high=10.0),
    Param('reserve_s', 0.012, 'part of deadline_s kept for the gate and the transport: where the '
          'model has not finished by deadline_s - reserve_s, the last plan goes on', low=0.0, high=1.0),
    Param('headroom_s', 0.003, 'by how much more a better tier must fit before it is taken up again', low=0.0, high=1.0),
    Param('recovery_ticks', 3, 'so many ticks in a row must be on time before a better tier is taken up again', low=1,
          high=1000),
    Param('tick_tolerance_s', 0.05, 'an image may come so much earlier than one step period after the last one used', low=0.0,
          high=1.0),
    Param('time_jump_s', 1.0, 'a gap in the stamps, or a step back, of more than this begins a new episode', low=0.1,
          high=3600.0),
    Param('future_tolerance_s', 0.1, 'how far in the future an image may be stamped, for clocks that differ '
          'a little and for a coarse /clock', low=0.0, high=10.0),
    Param('camera_timeout_s', 0.25, 'time without an image (steady clock) after which the robot is stopped',
          low=0.01, high=60.0),
    Param('frozen_camera_timeout_s', 0.5, 'the robot is stopped when the image has not '
          'changed for so long although the executed command moves it; 0 turns this off, for a camera without '
          'any noise', low=0.0, high=60.0),
    Param('frozen_camera_recovery', 3, 'images to wait, once the image changes again, before driving goes on', low=1,
          high=1000),
    Param('what_if_horizon_s', 1.6, 'horizon of ~/what_if when a request leaves it open', low=0.1, high=10.0),
    Param('what_if_timeout_s', 5.0, 'time for ~/what_if when a request has no deadline', low=0.1, high=60.0),
    Param('what_if_denoising_steps', 2, 'of each chunk that ~/what_if imagines: 2 for sharper images; 1 takes a quarter '
          'less time, and tells commands apart a little better', low=1, high=2),
    Param('world_observes', False, 'of an open world model: commit real images to one long session and predict from its newest '
          'chunk; else each prediction begins a session with the newest image', while_configured=True),
    Param('world_chunks', 1, 'of an open world model: chunks of each prediction', low=1, high=16,
          while_configured=True),
    Param('world_deadline_s', 0.0, 'of an open world model: time that a prediction should take; where it would not, it is made '
          'in fewer steps, or by the smaller model that world.json names; 0: always as well as it can be', low=0.0, high=600.0,
          while_configured=True),
    Param('session_directory', '', 'the folder of ~/save_session and ~/load_session, which take names of files in it '
          'only; empty: worldmodel_sessions in $ROS_HOME or ~/.ros. While a server drives, its own one is used'),
    Param('session_files_max', MAX_FILES, 'so many sessions may be saved in session_directory', low=1, high=10_000),
    Param('session_disk_mb', float(MAX_MB), 'disk that all of them may take together', low=1.0, high=1e7),
    DIAGNOSTICS_PERIOD,
    ALLOW_FAULTS,
    Param('fault_delay_ms', 0.0, 'for tests: added to every network call', low=0.0, high=10_000.0, fault=True),
    Param('fault_nan', False, 'for tests: the plan is NaN', fault=True),
    Param('fault_raise', False, 'for tests: every network call fails', fault=True),
    Param('fault_cuda_error', '', 'for tests: every network call raises the CUDA error of that name, such as "an illegal '
          'memory access was encountered"', fault=True),
    Param('realtime_priority', 0, 'SCHED_FIFO priority of the threads that receive and answer, 0 for none',
          low=0, high=99, read_only=True),
)
