"""Report of a fit: one JSON document, an HTML page rendered from it, and the comparison of two reports.

Pure: nothing here reads or writes a file.

    runs/<run_id>/report.json    the document
    runs/<run_id>/report.html    the page: no script, no network, light and dark, for screen and print

Trust: every text of a document is escaped, and the page forbids scripts and addresses by a content security policy.

Each module imports only those above it:

    charts   charts as SVG
    page     a document as a page
    compare  two documents side by side
"""
