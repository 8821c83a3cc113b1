"""How processes of one machine pass frames, plans and pictures: a Unix socket, and memory that two of them share."""
