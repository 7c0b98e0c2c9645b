//! The messages and services of `proto/`.
#![allow(missing_docs, clippy::all, dead_code)]

pub mod tensorflow {
    tonic::include_proto!("tensorflow");

    pub mod serving {
        tonic::include_proto!("tensorflow.serving");
    }
}

pub mod inference {
    tonic::include_proto!("inference");
}
