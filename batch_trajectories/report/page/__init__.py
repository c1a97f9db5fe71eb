"""The report page: one HTML file with its data.

writer           writes the page: template, scripts, style and data
audited_tasks    the tasks of an audit as data of the page
pieces           writes the data of large runs to files beside the page
core.js          reads the data
main.js          the page
table.js         the table of conversations
charts.js        the charts
conversation.js  a conversation
audit.js         tasks of an audit
page.css         the style
page.html        the frame
"""
