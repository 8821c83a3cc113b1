"""``python -m worldmodel_ros.cli``, for a machine on which the ``worldmodel`` executable is not on the path."""
import sys

from worldmodel_ros.cli import main

sys.exit(main())
