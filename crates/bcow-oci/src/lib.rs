//! bcow-oci
