"""The only code that changes state. One verb a function, keyword-only arguments, no request objects.

Bad input raises `errors.Refused` before anything is written.
"""
