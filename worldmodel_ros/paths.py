"""Finds executables and shared files of ROS packages, with or without a ROS distribution, and the user's cache folder."""
import os
import sys
from pathlib import Path

PACKAGE = 'worldmodel_ros'


class NotInstalledError(RuntimeError):
    """A package's file is in none of the searched prefixes."""


def prefixes() -> list[Path]:
    """Return the install prefixes in search order; without AMENT_PREFIX_PATH the interpreter's own."""
    named = [Path(p) for p in os.environ.get('AMENT_PREFIX_PATH', '').split(os.pathsep) if p]
    return named or [Path(sys.prefix)]


def find_executable(package: str, executable: str) -> Path:
    """
    Return the path of a package's executable in lib/<package>, where ``ros2 run`` and launch find it too.

    :raises NotInstalledError: if no prefix has it.
    """
    for prefix in prefixes():
        path = prefix / 'lib' / package / executable
        if path.is_file():
            return path
    raise NotInstalledError(
        f"executable '{executable}' of package '{package}' is in none of "
        f"{', '.join(str(p / 'lib' / package) for p in prefixes())}: install the package ('pip install .' or "
        "'colcon build'), or source the workspace that has it")


def config_directory() -> Path:
    """
    Return the directory of this package's configuration files.

    :raises NotInstalledError: if no prefix has it.
    """
    # In a source tree (an editable install), use the files being edited, not their installed copies.
    source = Path(__file__).resolve().parents[1]
    if (source / 'package.xml').is_file() and (source / 'config').is_dir():
        return source / 'config'
    for prefix in prefixes():
        path = prefix / 'share' / PACKAGE / 'config'
        if path.is_dir():
            return path
    raise NotInstalledError(f"no share/{PACKAGE}/config in {', '.join(map(str, prefixes()))}: install the "
                            'package, or source the workspace that has it')


def cache_folder() -> Path:
    """
    Return the folder for files made once per machine (exported graphs, compiled kernels).

    $WORLDMODEL_CACHE, or worldmodel_ros under the XDG cache folder.
    """
    if os.environ.get('WORLDMODEL_CACHE'):
        return Path(os.environ['WORLDMODEL_CACHE'])
    return Path(os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache') / PACKAGE
