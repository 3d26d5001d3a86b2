"""A plan at reduced sizes, run and compared with one device: ``wh.check``.

``check_plan`` is what users call; ``worker`` runs in a process of its own, on virtual
CPU devices. There ``mesh_reduction`` and ``role_sizes`` choose the sizes,
``reduced_model`` brings the user's loss to them (``resized_program`` where its code
holds sizes of its own), ``reduced_plan`` the plan, ``index_bounds`` and ``random_data``
make numbers, and ``one_device`` is what they are compared with.
"""
