"""Plan data, plan files, and the checks of a plan that is read."""
