"""A siege of daemons: connections that mean no good, some by strangers, some by one who has stolen a token or a certificate. ``python -m netem.siege``, an ``Orders`` as JSON on its
input, a tally on its output.

``orders`` what it is told; ``assault`` how it goes about it; ``knocking``, ``talking`` and ``web`` what each kind of connection does, gathered in ``kinds``; ``records`` TLS as no library would speak it.
"""
