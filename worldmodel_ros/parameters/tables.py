"""The tables of all nodes, by executable name."""

from worldmodel_ros.parameters import bag_player, command_gate, recorder, sim_robot, world_model_node
from worldmodel_ros.parameters.declaration import Param

TABLES: dict[str, tuple[Param, ...]] = {
    'world_model_node': world_model_node.PARAMETERS,
    'command_gate': command_gate.PARAMETERS,
    'sim_robot': sim_robot.PARAMETERS,
    'bag_player': bag_player.PARAMETERS,
    'recorder': recorder.PARAMETERS,
}
