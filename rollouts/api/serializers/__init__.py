"""How rows look as JSON. What comes in is checked by `rollouts.api.bodies`, so all of these only write."""
