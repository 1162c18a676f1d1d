"""`needlework doctor`: checks on one model of the properties (laws) that all measurements rely on."""
