"""The report page: one HTML file with its data.

writer           writes the page
page             puts script, style and data together
pieces           data of large runs, in files beside the page
training_form    a conversation as its training row
core.js          reading the data
main.js          the page
table.js         the table of conversations
charts.js        the charts
conversation.js  one conversation
page.css         the style
page.html        the frame
"""
