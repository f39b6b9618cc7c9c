"""Who may start next: what there is room for (`load`), and the order in which waiting rollouts get it (`order`).

Both the dispatcher, which fills the room, and the pages, which say what holds rollouts back, read the same `load`.
"""
