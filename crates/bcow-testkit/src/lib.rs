//! bcow-testkit
