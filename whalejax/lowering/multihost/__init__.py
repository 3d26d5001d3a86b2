"""Agreement checks and deadlines of steps that several processes run together."""
