"""Report of a fit: one JSON document, an HTML page rendered from it, and the comparison of two reports.

The functions are pure: they do not read or write files.

    runs/<run_id>/report.json    the document
    runs/<run_id>/report.html    the page: no script, no network, light and dark, for screen and print

Trust: every text of a document is escaped, and a content security policy forbids scripts and network access.

Each module imports only those above it:

    charts   charts as SVG
    page     a document as a page
    compare  two documents side by side
"""
