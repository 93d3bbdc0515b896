"""What the package costs: operations, notifications, large reads and many blocks, between real processes.

``python -m towline.bench`` prints the figures, with ``--json`` as one document; ``towline bench --python`` runs it and measures the
Rust figures beside it, in turns, over the same memory.
"""
