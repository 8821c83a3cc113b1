"""Writes a scene as an MJCF document: the room, the movable objects, the robot and its cameras."""
from collections.abc import Iterator
import math

from worldmodel_ros.sim import scene as sc
from worldmodel_ros.sim.movers import Shuttle, actuator_mjcf, body_mjcf

GRAVITY = 9.81
WALL_THICKNESS = 0.06
TOP_CAMERA_HEIGHT = 9.0

# For contacts and the stack, per state of a room. Driving takes up to 40 KiB, all objects inside each other 104. It is on
# the heap between small long-lived blocks: with 1 MiB, a process grew by 5 to 6 MiB over 300 rooms.
_MEMORY = '256K'

# Collision bits: wheels and casters meet the floor; chassis and objects meet the walls and one another.
_FLOOR = 'contype="1" conaffinity="2"'
_ROLLING = 'contype="2" conaffinity="1"'
_SOLID = 'contype="4" conaffinity="4"'
_VISUAL = 'contype="0" conaffinity="0" mass="0"'
# Shape, size, place and colour of the visual-only parts: top plate, heading mark, mast, camera head.
_ROBOT_LOOKS = (
    ('cylinder', '0.135 0.004', '0 0 0.143', '0.90 0.91 0.93'),
    ('box', '0.035 0.012 0.004', '0.09 0 0.146', '0.98 0.45 0.10'),
    ('cylinder', '0.014 0.045', '0.06 0 0.185', '0.17 0.18 0.21'),
    ('box', '0.018 0.04 0.02', '0.062 0 0.25', '0.17 0.18 0.21'),
)
# Geom groups: 0 solid and visible, 1 only visible, 2 the robot, 4 never drawn (MuJoCo draws groups 0 to 2).

# All scenes have the same textures and materials in this order, so that a GL context made for one draws them all.
_ASSETS = """
  <asset>
    <texture name="sky" type="skybox" builtin="gradient" rgb1="0.93 0.94 0.95" rgb2="0.70 0.78 0.86"
             width="64" height="384"/>
    <texture name="tiles" type="2d" builtin="checker" rgb1="1 1 1" rgb2="0.86 0.86 0.86" mark="edge"
             markrgb="0.74 0.74 0.74" width="128" height="128"/>
    <material name="floor0" texture="tiles" texuniform="true" texrepeat="1.25 1.25" specular="0"/>
    <material name="floor1" texture="tiles" texuniform="true" texrepeat="1.0 1.0" specular="0"/>
    <material name="floor2" texture="tiles" texuniform="true" texrepeat="0.7 0.7" specular="0"/>
    <material name="matt" specular="0.05" shininess="0.1"/>
    <material name="glossy" specular="0.45" shininess="0.6"/>
  </asset>"""


def _numbers(*values: float) -> str:
    return ' '.join(f'{float(v):.17g}' for v in values)


def top_camera_fov(scene: sc.Scene) -> float:
    """Return the field of view in degrees with which the overhead camera just shows the whole room, walls included."""
    reach = max(scene.width, scene.depth) / 2 + 1.5 * WALL_THICKNESS
    return 2 * math.degrees(math.atan2(reach, TOP_CAMERA_HEIGHT - scene.wall_height))


def _walls(scene: sc.Scene) -> Iterator[str]:
    half_x, half_y, half_z, t = scene.width / 2, scene.depth / 2, scene.wall_height / 2, WALL_THICKNESS / 2
    yaws = (math.pi, -math.pi / 2, 0.0, math.pi / 2)  # the body's x axis points into the room
    places = ((half_x, 0), (0, half_y), (-half_x, 0), (0, -half_y))
    spans = (half_y, half_x, half_y, half_x)
    for i, (wall, yaw, (x, y), span) in enumerate(zip(scene.walls, yaws, places, spans, strict=True)):
        yield f'<body pos="{_numbers(x, y, 0)}" euler="{_numbers(0, 0, yaw)}">'
        yield (f'<geom name="wall{i}" type="box" material="matt" rgba="{_numbers(*wall.rgb, 1)}" {_SOLID} '
               f'friction="{_numbers(scene.wall_friction)} 0.005 0.0001" '
               f'pos="{_numbers(-t, 0, half_z)}" size="{_numbers(t, span + 2 * t, half_z)}"/>')
        for panel in wall.panels:
            yield (f'<geom type="box" material="matt" rgba="{_numbers(*panel.rgb, 1)}" {_VISUAL} group="1" '
                   f'pos="{_numbers(0, panel.along, panel.above)}" '
                   f'size="{_numbers(0.006, panel.half_width, panel.half_height)}"/>')
        skirting = [0.55 * c for c in wall.rgb]
        yield (f'<geom type="box" material="matt" rgba="{_numbers(*skirting, 1)}" {_VISUAL} group="1" '
               f'pos="0 0 0.035" size="{_numbers(0.012, span, 0.035)}"/>')
        yield '</body>'


def _prop(prop: sc.Prop) -> Iterator[str]:
    if prop.shape == 'box':
        side = prop.radius / math.sqrt(2.0)
        half_height, size = prop.height / 2, (side, side, prop.height / 2)
    elif prop.shape == 'cylinder':
        half_height, size = prop.height / 2, (prop.radius, prop.height / 2)
    else:
        straight = max(0.02, prop.height / 2 - prop.radius)
        half_height, size = straight + prop.radius, (prop.radius, straight)
    # Objects move in the plane only: they never topple, and their dry friction with the floor costs three
    # constraint rows instead of the contacts of a footprint.
    drag = prop.friction * prop.mass * GRAVITY
    yield (f'<body name="{prop.colour}" pos="{_numbers(prop.x, prop.y, half_height)}" '
           f'euler="{_numbers(0, 0, prop.yaw)}">')
    yield f'<joint type="slide" axis="1 0 0" frictionloss="{_numbers(drag)}" damping="0.5"/>'
    yield f'<joint type="slide" axis="0 1 0" frictionloss="{_numbers(drag)}" damping="0.5"/>'
    yield (f'<joint type="hinge" axis="0 0 1" frictionloss="{_numbers(drag * prop.radius * 0.6)}" '
           'damping="0.005"/>')
    yield (f'<geom name="{prop.colour}" type="{prop.shape}" size="{_numbers(*size)}" '
           f'mass="{_numbers(prop.mass)}" material="glossy" rgba="{_numbers(*prop.rgb, 1)}" {_SOLID} '
           'friction="0.3 0.005 0.0001"/>')
    # A dark patch on the floor instead of a shadow, which would need a second pass over the scene.
    yield (f'<geom type="cylinder" size="{_numbers(prop.radius * 1.2, 0.0015)}" rgba="0 0 0 0.28" {_VISUAL} '
           f'group="1" pos="{_numbers(0, 0, 0.002 - half_height)}"/>')
    yield '</body>'


def _camera_axes(scene: sc.Scene) -> tuple[float, ...]:
    yaw, pitch = scene.camera_rotation[0], sc.CAMERA_PITCH + scene.camera_rotation[1]
    right = (math.sin(yaw), -math.cos(yaw), 0.0)
    up = (math.sin(pitch) * math.cos(yaw), math.sin(pitch) * math.sin(yaw), math.cos(pitch))
    return (*right, *up)


def _robot(scene: sc.Scene) -> Iterator[str]:
    x, y, yaw = scene.start
    camera = [a + b for a, b in zip((sc.CAMERA_X, 0.0, sc.CAMERA_Z), scene.camera_offset, strict=True)]
    yield f'<body name="base" pos="{_numbers(x, y, 0)}" euler="{_numbers(0, 0, yaw)}">'
    yield '<freejoint name="base"/>'
    yield (f'<geom name="chassis" type="cylinder" size="{_numbers(sc.ROBOT_RADIUS, 0.045)}" pos="0 0 0.095" '
           f'mass="{_numbers(scene.base_mass)}" rgba="0.17 0.18 0.21 1" material="glossy" {_SOLID} group="2" '
           'friction="0.3 0.005 0.0001"/>')
    for shape, size, place, rgb in _ROBOT_LOOKS:
        yield f'<geom type="{shape}" size="{size}" pos="{place}" rgba="{rgb} 1" {_VISUAL} group="2"/>'
    for x_caster in (0.115, -0.115):
        # MuJoCo uses the larger friction of the two geoms in contact; without the priority that is the floor's, and
        # the casters would brake the robot to a quarter of its command.
        yield (f'<geom type="sphere" size="0.03" pos="{x_caster} 0 0.0305" priority="1" condim="1" '
               f'mass="0.05" {_ROLLING} group="2" rgba="0.3 0.3 0.32 1"/>')
    yield (f'<camera name="camera" pos="{_numbers(*camera)}" xyaxes="{_numbers(*_camera_axes(scene))}" '
           f'fovy="{sc.CAMERA_FOV_DEG}"/>')
    for name, sign in (('left', 1.0), ('right', -1.0)):
        yield (f'<body name="{name}" pos="{_numbers(0, sign * sc.TRACK / 2, sc.WHEEL_RADIUS)}">'
               f'<joint name="{name}" type="hinge" axis="0 1 0" damping="0.002"/>'
               f'<geom type="cylinder" size="{sc.WHEEL_RADIUS} 0.008" zaxis="0 1 0" mass="0.2" {_ROLLING} '
               f'group="2" rgba="0.08 0.08 0.09 1" '
               f'friction="{_numbers(scene.wheel_friction)} 0.005 0.0001"/></body>')
    yield '</body>'


def to_mjcf(scene: sc.Scene, timestep: float) -> str:
    """Return the MJCF document of a scene, for a physics step of ``timestep`` seconds."""
    half = (scene.width / 2 + WALL_THICKNESS, scene.depth / 2 + WALL_THICKNESS)
    d, a = scene.light_diffuse, scene.light_ambient
    bodies = [*_walls(scene), *(line for prop in scene.props for line in _prop(prop)), *_robot(scene),
              *(line for mover in scene.movers for line in body_mjcf(mover, _SOLID, _VISUAL))]
    actuators = [
        f'<velocity name="{name}" joint="{name}" kv="0.8" ctrlrange="-17 17" forcerange="-2 2"/>'
        for name in ('left', 'right')]
    actuators += [actuator_mjcf(mover) for mover in scene.movers if isinstance(mover, Shuttle)]
    return f"""<mujoco model="room">
  <compiler angle="radian" autolimits="true"/>
  <option timestep="{timestep}" integrator="implicitfast" cone="pyramidal" iterations="20"
          ls_iterations="10"/>
  <size memory="{_MEMORY}"/>
  <statistic extent="4" center="0 0 0.3"/>
  <visual>
    <global offwidth="640" offheight="480"/>
    <quality shadowsize="0" offsamples="0" numslices="20" numstacks="6" numquads="2"/>
    <map znear="0.0025" zfar="5"/>
    <headlight ambient="{a} {a} {a}" diffuse="0.24 0.24 0.24" specular="0.1 0.1 0.1"/>
  </visual>{_ASSETS}
  <worldbody>
    <light pos="{_numbers(*scene.light_position)}" dir="0 0 -1" type="point" castshadow="false"
           diffuse="{d} {d} {d}" specular="0.3 0.3 0.3" attenuation="1 0 0"/>
    <camera name="top" pos="0 0 {TOP_CAMERA_HEIGHT}" xyaxes="1 0 0 0 1 0"
            fovy="{_numbers(top_camera_fov(scene))}"/>
    <geom name="ground" type="plane" size="0 0 1" {_FLOOR} group="4" friction="0.4 0.005 0.0001"/>
    <geom name="floor" type="box" size="{_numbers(*half, 0.02)}" pos="0 0 -0.02" material="floor{scene.floor}"
          rgba="{_numbers(*scene.floor_rgb, 1)}" {_VISUAL} group="1"/>
    {chr(10).join(bodies)}
  </worldbody>
  <actuator>{''.join(actuators)}</actuator>
</mujoco>"""
