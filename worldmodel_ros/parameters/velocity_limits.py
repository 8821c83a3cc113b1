"""Limits of a differential-drive base, for the command gate and for what is imagined. They are named as in ros2_controllers'
diff_drive_controller."""

from worldmodel_ros.parameters.declaration import Param

VELOCITY_LIMITS = (
    Param('linear.x.min_velocity', -0.3, 'minimum linear.x: the highest reverse speed, negative', 'm/s', high=0.0,
          formerly='v_min'),
    Param('linear.x.max_velocity', 0.6, 'maximum linear.x', 'm/s', low=0.0, formerly='v_max'),
    Param('linear.x.max_acceleration', 1.5, 'maximum rate of change of linear.x, both accelerating and braking', 'm/s^2',
          low=0.001, formerly='a_max'),
    Param('angular.z.max_velocity', 1.5, 'maximum angular.z, in both directions', 'rad/s', low=0.0, formerly='w_max'),
    Param('angular.z.max_acceleration', 6.0, 'maximum rate of change of angular.z, in both directions', 'rad/s^2', low=0.001,
          formerly='alpha_max'),
)
