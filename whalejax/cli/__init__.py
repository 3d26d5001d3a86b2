"""The command line: its options, training sessions and reports."""
