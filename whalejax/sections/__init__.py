"""Tables in separate processes, whose work overlaps with a dense section.

``sparse_section`` starts the processes and replaces failed ones. ``pipeline`` passes
batches, vectors and gradients through both sections in order.
"""
