"""The page of `view`.

view.html  the frame
"""
