"""A simulated differential-drive robot in a walled room: data source, ground truth and embedded default."""
