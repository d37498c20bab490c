"""The scale model: the bundled pair's function at a real model's cost, generated on the host that needs it."""
