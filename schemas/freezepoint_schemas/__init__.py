"""The message contract of freezepoint: events, results and their wire form."""
