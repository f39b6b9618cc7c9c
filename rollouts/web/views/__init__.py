"""One module a page. Views look up, call a selector or a service, and render; every row goes through `web.access`."""
