"""Jobs on one cluster: who gets how many devices, as jobs come and end."""
