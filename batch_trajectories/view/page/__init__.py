"""The page of `view`: that of the report, whose data comes from the server.

frame         joins its parts with those of report/page/
server.js     the source: runs, rows and conversations from the server; addresses
runs.js       all runs
comparing.js  runs side by side
reading.js    requests, other samples, and the end of a conversation while it is in flight
deciding.js   what people decide
steering.js   what changes a run that works
view.html     the places of the view in the report's frame
view.css      their style
"""
