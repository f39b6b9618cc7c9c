"""The HTTP API. Views check the shape of what they are sent, services do the work, selectors read."""
