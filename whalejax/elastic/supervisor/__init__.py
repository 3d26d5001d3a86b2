"""The process that manages an elastic run: members, generations, journal."""
