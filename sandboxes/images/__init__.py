"""Images: root file systems that environments name, built by jobs into a store whose entries are named by their contents.

`states` is the life of images and builds; `sources` says what an image can be made from; `unpack`, `layers` and `digest` are
about root file systems, `store` keeps them; `build` makes one from a source. None of these knows Django. `services` is the only
code that writes the rows.
"""
