"""The web page of the coordinator: a run as it goes, for the eyes only.

| file | what it holds |
|---|---|
| `server.py` | the listener: off unless it has an address and a token; loopback, or TLS |
| `app.py` | routes, the token, the headers of every answer |
| `views.py` | what the routes answer, as JSON values |
| `live_run.py` | the files of a run, read again only where they are new |
| `static/` | page, script and style; no build step, nothing from elsewhere |

It reads and never changes. Pictures are drawn here, by the functions that draw the report, and
every text in them is escaped there; the script of the page puts texts into the document as texts.
A content security policy allows the page's own script and style and nothing else.
"""

from services.coordinator.web.server import serve_web

__all__ = ["serve_web"]
