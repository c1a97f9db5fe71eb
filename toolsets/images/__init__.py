"""Container images in a directory: found by name or digest, and unpacked once each.

archives     OCI layouts, and archives of them or of `docker save`
layouts      writes a layout that many images share
names        references, which images they mean, and ImageError
layers       layers as one directory tree that is safe on this machine
store        the unpacked images of this user
users        who commands of an image run as
bases        layers that many conversations of an image begin above

Other rooms import bases, layers, layouts, names, store, users.
"""
