"""Container images in a directory: found by name or digest, and unpacked once each.

image_error  an image that is missing, damaged or refused
archives     OCI layouts, and archives of them or of `docker save`
layouts      writes a layout that many images share
names        references, and which images they mean
layers       layers as one directory tree that is safe on this machine
store        the unpacked images of this user
users        who commands of an image run as

Other rooms import image_error, layers, layouts, names, store, users.
"""
