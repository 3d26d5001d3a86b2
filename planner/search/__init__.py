"""The search: from a request to the plan that is chosen."""
