"""Tests of report/: the report page.

test_report        the page as a file
test_report_page   the page in a browser
"""
