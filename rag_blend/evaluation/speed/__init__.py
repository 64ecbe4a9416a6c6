"""How fast things are: what a user could do instead, side by side, in turns, wall and CPU time."""
