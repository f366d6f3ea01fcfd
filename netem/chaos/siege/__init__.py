"""A siege: attack connections to running daemons, some by strangers, some with a stolen token or certificate. ``python
-m netem.chaos.siege`` reads ``SiegeSettings`` as JSON on its input and writes a tally to its output.

``siege_settings`` holds the settings, ``siege`` schedules the connections. ``tls_attacks``, ``wire_attacks`` and
``http_attacks`` implement the kinds, which ``attack_table`` lists. ``tls_records`` makes TLS records that no library
would send.
"""
