"""Keys and values of what a session has seen."""
