"""Compares plans with the output of their hardware's compiler, without a device.

``targets`` lists the targets of compilation. ``processes`` runs ``compile_worker`` in a
separate process with a deadline. ``comparison`` compares the plan's predictions with
the compiled program, and ``report`` formats the result.
"""
