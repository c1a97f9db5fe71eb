"""The report page: one HTML file with its data.

writer           writes the page: template, scripts, style and data
frame            the frame and the scripts that pages share
audited_tasks    the tasks of an audit as data of the page
pieces           writes the data of large runs to files beside the page
core.js          elements, words and numbers; what a source of data is
source.js        the source of the report: data inside the page or beside it
summary.js       what charts show of some rows
main.js          addresses, keys, what is known of the run
table.js         the table of conversations
charts.js        the charts
conversation.js  a conversation
results.js       results of calls: differences, tables, JSON
audit.js         tasks of an audit
page.css         the style
page.html        the frame

All but source.js is also the page of `batch_trajectories.view`, whose source is a server.
"""
