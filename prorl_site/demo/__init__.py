"""`prorl demo`: the main job end to end on one machine, through the public API and the project's own client."""
