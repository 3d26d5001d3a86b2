"""Tables in processes of their own, overlapped with a dense section.

``sparse_section`` starts the processes and replaces failed ones; ``pipeline`` passes
batches, vectors and gradients in order through both sections.
"""
