"""The process that holds an elastic run together: members, generations, journal."""
