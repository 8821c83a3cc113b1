"""Names of topics that belong together; without OpenCV, so that a recorder starts without it."""


def info_topic(image_topic: str) -> str:
    """Return the CameraInfo topic that belongs to an image topic: its sibling, as in image_transport."""
    return f'{image_topic.removesuffix("/compressed").rpartition("/")[0]}/camera_info'
